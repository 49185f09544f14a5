"""The card that goes to the hub: who is cited, by which settings the model was trained, and what stays here."""

from dash_trl import DASHTrainer, __version__
from dash_trl.model_card import with_settings_of_run
from tests.tiny import run


def test_the_card_of_a_run_cites_dash_and_names_its_settings(tiny_model, tmp_path):
    settings = {"loss_type": "dr_grpo", "gradient_filter_threshold": 0.1, "save_strategy": "steps", "save_steps": 1}
    trainer = run(DASHTrainer, tiny_model, tmp_path, **settings)
    card = (tmp_path / "README.md").read_text()  # written with the checkpoint
    assert "fine-tuned version of a local model" in card and "huggingface.co/None" not in card
    assert "2505.17218" in card and "huang2025effective" in card and "dash" in card.partition("---\n\n")[0]
    rows = dict(line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| `"))
    assert rows["`loss_type`"] == "dr_grpo" and rows["`gradient_filter_threshold`"] == "0.1"
    assert rows["`num_generations`"] == "4" and rows["`seed`"] == "42" and rows["`beta`"] == "0.0"
    assert "`async_level`" not in rows  # it has its default
    assert f"dash_trl {__version__}" in card and card.index("### Settings") < card.index("### Framework versions")
    trainer.args.vllm_server_urls, trainer.args.async_level = ["http://10.1.2.3:8000"], 2
    again = with_settings_of_run("# A card", trainer.args, 2)
    assert "| `async_level` | 2 |" in again and "2 processes" in again and "10.1.2.3" not in again
    trainer.create_model_card(model_name="x")
    assert (tmp_path / "README.md").read_text().count("### Settings") == 1
