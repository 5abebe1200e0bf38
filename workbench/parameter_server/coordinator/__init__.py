"""What the chief does: a bounded queue of closures, dispatch, retries, the watchdog."""
