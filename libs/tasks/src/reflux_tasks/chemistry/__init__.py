"""What tasks about crystals and reactions share: symmetry, sanity, charges, energies by CHGNet and Quantum ESPRESSO."""
