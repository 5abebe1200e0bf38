"""How often the workbench is right: planted faults and healthy trainings, diagnosed with default settings and scored."""
