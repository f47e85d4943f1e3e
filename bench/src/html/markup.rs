//! HTML and SVG as text: every element is closed, every text and attribute escaped.

use std::fmt::{Display, Write as _};

/// A document that grows.
#[derive(Default)]
pub(crate) struct Markup(String);

/// Elements of HTML without an end tag. Written as XML has it, which HTML takes too.
const VOID: &[&str] = &["meta", "br"];

impl Markup {
    /// An element with whatever `content` puts inside.
    pub(crate) fn element(
        &mut self,
        name: &str,
        attributes: &[(&str, &dyn Display)],
        content: impl FnOnce(&mut Self),
    ) {
        // Formatting into a text does not fail.
        let _ = write!(self.0, "<{name}");
        for (name, value) in attributes {
            let _ = write!(self.0, " {name}=\"{}\"", escaped(&value.to_string()));
        }
        let is_void = VOID.contains(&name);
        self.0.push_str(if is_void { "/>" } else { ">" });
        content(self);
        if !is_void {
            let _ = write!(self.0, "</{name}>");
        }
    }

    /// An element with only a text inside.
    pub(crate) fn leaf(&mut self, name: &str, attributes: &[(&str, &dyn Display)], text: &str) {
        self.element(name, attributes, |inside| inside.text(text));
    }

    /// A text.
    pub(crate) fn text(&mut self, text: &str) {
        self.0.push_str(&escaped(text));
    }

    /// What is markup already.
    pub(crate) fn raw(&mut self, markup: &str) {
        self.0.push_str(markup);
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }
}

/// Safe between tags and between quotes. What XML forbids becomes the replacement character.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c if c.is_control() && !matches!(c, '\t' | '\n' | '\r') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
