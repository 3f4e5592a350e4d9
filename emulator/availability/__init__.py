"""When devices are available: churn traces and generators."""
