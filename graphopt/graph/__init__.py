"""Define training graphs; read and rewrite models. This package imports rooms of lower floors only."""
