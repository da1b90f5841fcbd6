"""Auto classes restore patched folders once skipless.hf is imported, and only then.

Registering lasts as long as the process, so each check runs in one of its own.
"""

import subprocess
import sys

CODE = """
import sys, torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
sys.path.insert(0, sys.argv[1])
from conftest import build, inputs, logits
from skipless.surgery import connections, patch, unpatch

model, batch = patch(build("llama"), "interpolate"), inputs("llama")
with torch.no_grad():
    for module in connections(model).values():
        for parameter in module.parameters():
            parameter.add_(0.5)
model.save_pretrained(sys.argv[2])
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[2])
    raise SystemExit("a plain load went through")
except ValueError as error:
    assert "skipless-patched" in str(error), error

import skipless.hf
skipless.hf.register()  # again
again = AutoModelForCausalLM.from_pretrained(sys.argv[2], attn_implementation="eager")
assert type(again).__name__ == "LlamaForCausalLM" and len(connections(again)) == 4
assert again.config.model_type == "llama" and again.config._attn_implementation == "eager"
half = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)
assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
again.set_attn_implementation(model.config._attn_implementation)
with torch.no_grad():
    assert torch.equal(logits(again, batch), logits(model, batch))
assert AutoConfig.from_pretrained(sys.argv[2]).skipless_patch == model.config.skipless_patch
try:
    AutoModel.from_pretrained(sys.argv[2])
    raise SystemExit("the head was dropped in silence")
except ValueError as error:
    assert "holds a LlamaForCausalLM, which AutoModel does not make" in str(error), error
try:
    transformers.LlamaForCausalLM.from_pretrained(sys.argv[2])
    raise SystemExit("a plain load went through")
except OSError as error:
    assert "model.safetensors" in str(error), error
unpatch(again).save_pretrained(sys.argv[2] + "-plain")
plain = AutoModelForCausalLM.from_pretrained(sys.argv[2] + "-plain")
assert type(plain) is transformers.LlamaForCausalLM
print("restored")
"""


def test_auto_classes_restore_a_patched_folder(tmp_path, request):
    families = request.config.rootpath / "tests" / "surgery"
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(families), str(tmp_path / "patched")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("restored\n"), done.stderr[-2000:]
