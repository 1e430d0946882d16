"""Built-in estimators of off-policy evaluation."""
