"""All of tests/gpu on one GPU, in many processes, in pieces, with a summary: `python -m gpu_run`.

cli      the command line; what the machine is
parent   a piece of a run: processes that are started again where a test ended them, until the time is up
worker   a pytest plugin: a process takes the next test that no other has, and writes down how it ended
records  what they tell one another, in files
report   the summary, and the row of a record
"""
