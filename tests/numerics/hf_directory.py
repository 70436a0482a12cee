"""A GGUF model as a Hugging Face directory: the same float32 weights in shards, the same tokenizer and template."""

from pathlib import Path

from tokenizers.decoders import ByteLevel

from headrace.model.gguf_metadata import read_gguf
from headrace.model.gguf_vocabulary import vocabulary_from_gguf
from headrace.model.load import load_model
from tests.model.tiny import write_hf, write_json


def export(gguf_path: Path, directory: Path, *, num_shards: int) -> Path:
    """Writes float32, for a quantized file up to eight times its size. The vocabulary must be a byte-level one."""
    model = load_model(gguf_path)
    write_hf(directory, model.config, model.weights, num_shards=num_shards)
    header = read_gguf(gguf_path)
    vocabulary = vocabulary_from_gguf(header)
    vocabulary.backend.decoder = ByteLevel()
    vocabulary.backend.save(str(directory / "tokenizer.json"))
    named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    texts = {name: vocabulary.backend.id_to_token(index) for name, index in named.items() if index is not None}
    write_json(directory / "tokenizer_config.json", texts | {"add_bos_token": vocabulary.add_bos})
    template = header.fields["tokenizer.chat_template"]
    assert isinstance(template, str)
    (directory / "chat_template.jinja").write_text(template)
    return directory
