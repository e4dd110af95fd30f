"""The mechanisms that move bytes, one module each, behind `TransferBackend`."""
