"""From a program to kernel source: folds, passes, plans and rendering; touches no device."""
