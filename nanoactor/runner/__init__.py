"""The runner, which executes steps on the device. Only this part of the engine and the models
import torch."""
