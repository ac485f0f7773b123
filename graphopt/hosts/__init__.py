"""Write training graphs for hosts without Python. Imports `compiler`, `runtime`, `graph` and what lies below."""
