//! HTML, SVG and XML that text cannot break out of: what is not a literal of this crate is escaped.

use std::fmt::Display;

/// A piece of markup under construction.
///
/// Tags and attribute names are literals; every other string, whatever file it comes from, goes
/// through [`escape`].
///
/// ```
/// use sonicmoe::report::Markup;
/// let mut page = Markup::default();
/// page.leaf("p", &[("title", &"\" onclick=\"x")], "<script>");
/// assert_eq!(page.finish(), "<p title=\"&quot; onclick=&quot;x\">&lt;script&gt;</p>\n");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Markup(String);

/// Names of attributes with their values.
pub type Attributes<'a> = &'a [(&'static str, &'a dyn Display)];

impl Markup {
    /// Markup that stands in this crate's source.
    pub fn literal(&mut self, markup: &'static str) {
        self.0 += markup;
    }

    /// Text between tags.
    pub fn text(&mut self, text: impl Display) {
        self.0 += &escape(&text.to_string());
    }

    /// A tag that [`Markup::close`] ends.
    pub fn open(&mut self, tag: &'static str, attributes: Attributes<'_>) {
        self.start(tag, attributes);
        self.0.push('>');
    }

    /// The end of a tag, and of a line.
    pub fn close(&mut self, tag: &'static str) {
        self.0 += "</";
        self.0 += tag;
        self.0 += ">\n";
    }

    /// A tag with text and nothing else inside.
    pub fn leaf(&mut self, tag: &'static str, attributes: Attributes<'_>, text: impl Display) {
        self.open(tag, attributes);
        self.text(text);
        self.close(tag);
    }

    /// A tag with nothing inside.
    pub fn empty(&mut self, tag: &'static str, attributes: Attributes<'_>) {
        self.start(tag, attributes);
        self.0 += "/>\n";
    }

    /// Markup that was made apart.
    pub fn append(&mut self, other: &Self) {
        self.0 += &other.0;
    }

    /// All of it.
    pub fn finish(self) -> String {
        self.0
    }

    fn start(&mut self, tag: &'static str, attributes: Attributes<'_>) {
        self.0.push('<');
        self.0 += tag;
        for (name, value) in attributes {
            self.0.push(' ');
            self.0 += name;
            self.0 += "=\"";
            self.0 += &escape(&value.to_string());
            self.0.push('"');
        }
    }
}

/// Text as it may stand between tags or in a quoted attribute, in HTML as in XML. Characters that
/// XML 1.0 does not have become U+FFFD, and those that turn the direction of a line are named.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            '\t' | '\n' => escaped.push(character),
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => escaped.extend(character.escape_unicode()),
            _ if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => escaped.push('\u{fffd}'),
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_leaves_its_place() {
        let hostile = "</p><script>alert('1')</script>\" onload=\"x&\u{0}\u{1b}\u{202e}";
        let escaped = escape(hostile);
        assert!(!escaped.contains(['<', '>', '"', '\'', '\u{0}', '\u{1b}', '\u{202e}']), "{escaped}");
        assert!(escaped.contains("alert(&#39;1&#39;)") && escaped.contains("x&amp;"), "{escaped}");
    }
}
