"""Moving bytes between host and device memory, behind `Ticket`."""
