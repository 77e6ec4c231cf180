"""Tables in host memory and on disk against the same tables on the device: times of steps,
and bytes moved."""
