"""Makes the weight-transfer engine `reflux` known to vLLM. Importing this package imports neither vLLM nor torch."""

BACKEND = "reflux"
"""Name for `--weight-transfer-config '{"backend": "reflux"}'`."""


def register() -> None:
    """Entry point of group vllm.general_plugins; vLLM calls it once or more in every process."""
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "reflux_vllm_plugin.engine", "RefluxWeightEngine")
    except ValueError as error:
        if "already registered" not in str(error):
            raise
