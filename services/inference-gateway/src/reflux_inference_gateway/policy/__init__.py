"""Pure policies of the gateway besides routing: what enters, which version it goes to, whom to spare."""
