"""The demo model's making: its corpus, its training, its checkpoint.

The questions and answers come from the command line's own flag table, the environment variables' descriptions and
``faq.md`` beside this file. Where the model is kept, and when it is made: `entrypoints.demo_model`.
"""
