"""The paper's distillation experiment on a teacher of our own: `python -m scripts.replicate -h`.

`plan` reads what is to be done, `run` does it, several jobs at once, each a process of `job`; `data` makes
token files and documents beforehand, `results` keeps what was measured in one compressed file, and `figures`
and `tables` make every picture and table of docs/replication.md from that file alone.
"""
