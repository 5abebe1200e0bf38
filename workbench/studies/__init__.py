"""Which trials to run. A study may ask a diagnosis when to stop; any trainer can run its trials."""
