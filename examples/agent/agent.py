"""An agent with OpenAI's client, and a calculator as its tool.

python examples/calculator/calculator.py         # the model, in runs/calculator
kedge ppo --config examples/agent/run.yaml       # PPO with the agent
"""

import json

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def multiply(a, b):
    """The calculator."""
    return a * b


def result(call):
    """The message with the result of a call, or with what is wrong with it."""
    try:
        content = str(multiply(**json.loads(call.function.arguments)))
    except TypeError as error:
        content = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}


async def run(row, client):
    """Ask for a product until an answer calls no tool; return 1 if that answer is right."""
    messages = [*row["messages"]]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[MULTIPLY])
        message = answer.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == row["answer"])
        messages += [message, *map(result, message.tool_calls)]
