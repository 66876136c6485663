"""People in the loop: what they are asked, their answers, how far they agree, and the data sets that result."""
