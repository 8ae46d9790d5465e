"""What to do about what the bytes say: plain state, without threads, sockets or clocks."""
