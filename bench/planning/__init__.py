"""What is predicted: plans, what the cost model says, and the least time that a step can take."""
