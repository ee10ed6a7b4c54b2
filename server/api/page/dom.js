// Elements of the page. Names of tenants and models come from outside: they become text and never markup.

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A new element with these properties (`class`, `text`, attributes, `on...` for listeners) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set an element's text, if it is another one: screen readers and selections are left alone otherwise. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set or remove an attribute, if that changes anything. */
export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Have one child of `parent` for each item, in their order: children are kept by key, so that focus stays where it is.
 * `create(item)` makes a child, `update(child, item)` writes into it; `empty` is shown where there are no items.
 */
export function keep(parent, items, key, create, update, empty = "") {
  const known = new Map([...parent.children].filter((each) => each.dataset.key).map((each) => [each.dataset.key, each]));
  const wanted = items.map((item) => {
    const name = key(item);
    const child = known.get(name) ?? create(item);
    child.dataset.key = name;
    known.delete(name);
    update(child, item);
    return child;
  });
  known.forEach((child) => child.remove());
  wanted.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
  if (!wanted.length && empty) parent.append(make(parent.tagName === "OL" ? "li" : "p", { class: "muted", text: empty }));
}

/** Have a select offer these values, and keep what is chosen. */
export function setOptions(select, values) {
  if ([...select.options].map((each) => each.value).join("\n") === values.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((value) => make("option", { value, text: value })));
  if (values.includes(chosen)) select.value = chosen;
}
