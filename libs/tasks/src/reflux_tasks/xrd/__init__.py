"""X-ray phase identification on the AFLOW prototypes (Mehl et al. 2017, Hicks et al. 2019 and 2021)."""
