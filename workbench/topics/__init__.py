"""One folder a question: its study, diagnosis, figures and panel."""
