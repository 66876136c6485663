"""Human labels: questions to people, their answers and agreement, and the resulting data sets."""
