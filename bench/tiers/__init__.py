"""Tables in host memory against the same tables on the device: times of steps, and bytes moved."""
