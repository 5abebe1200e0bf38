"""Where workers and servers live: threads of this process, or Ray actors."""
