"""Write a checkpoint of COUNT small bf16 tensors. usage: python3 make_many_tensors.py DIR COUNT"""
import json, os, struct, sys

directory, count = sys.argv[1], int(sys.argv[2])
os.makedirs(directory, exist_ok=True)
header = {
    f"model.layers.{number}.weight": {"dtype": "BF16", "shape": [64, 4], "data_offsets": [number * 512, number * 512 + 512]}
    for number in range(count)
}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(os.path.join(directory, "model.safetensors"), "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + os.urandom(count * 512))
with open(os.path.join(directory, "config.json"), "w") as file:
    json.dump({"architectures": ["ManyForCausalLM"], "model_type": "many"}, file)
