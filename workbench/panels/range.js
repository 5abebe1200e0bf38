// A slider over named values: a native range input, whose value is read aloud as it is shown, and not as its position.

export default {
  render({ model, el }) {
    const id = `wb-range-${Math.random().toString(36).slice(2)}`;
    const label = Object.assign(document.createElement("label"), { htmlFor: id, textContent: model.get("label") });
    const input = Object.assign(document.createElement("input"), { type: "range", id, min: 0, step: 1 });
    const shown = Object.assign(document.createElement("output"), { htmlFor: id });
    shown.setAttribute("aria-hidden", "true");
    const draw = () => {
      const texts = model.get("texts");
      input.max = texts.length - 1;
      if (Number(input.value) !== model.get("index")) input.value = model.get("index");
      shown.textContent = texts[model.get("index")];
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    let sending;
    input.addEventListener("input", () => {
      model.set("index", Number(input.value));
      clearTimeout(sending); // what is passed on the way takes as long to draw as where it ends
      sending = setTimeout(() => model.save_changes(), 150);
    });
    input.addEventListener("keydown", (event) => event.stopPropagation()); // the notebook has keys of its own
    model.on("change:index change:texts", draw);
    el.classList.add("wb-range");
    el.setAttribute("data-lm-suppress-shortcuts", "true");
    el.append(label, input, shown);
    draw();
    return () => model.off("change:index change:texts", draw);
  },
};
