"""Where runs are tracked: the port, MLflow over REST, and the delivery that survives its being away."""
