"""Whether an engine's answers are right: the rule, inputs to try it with, a reference, and what was found before."""
