"""Where jobs run when it is not a child of this service: one file per mechanism."""
