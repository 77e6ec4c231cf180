"""Files and folders on local disks and in object stores, written in chunks and checked."""
