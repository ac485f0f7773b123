"""Train with several processes: on one machine, on several, or on devices that keep their data."""
