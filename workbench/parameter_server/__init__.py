"""Parameter-server training: variables live on servers, workers compute, a coordinator dispatches (requirements T1 to T13)."""
