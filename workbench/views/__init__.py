"""What JupyterLab shows of whole studies: live view, curves, browser."""
