"""CUDA graphs of what a step does, each beside the eager code it replaces: a column, a small step, a backbone, …"""
