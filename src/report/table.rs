//! Plain tables: columns as wide as their widest cell, numbers to the right.

use std::fmt;

/// Where a column's cells stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Rows of cells under headers; prints with [`fmt::Display`] or as Markdown.
///
/// ```
/// use sonicmoe::report::{Align, Table};
/// let mut table = Table::new([("claim", Align::Left), ("cases", Align::Right)]);
/// table.row(["o is right", "200"]);
/// assert_eq!(table.to_string(), "claim       cases\n──────────  ─────\no is right    200\n");
/// assert_eq!(table.markdown(), "| claim | cases |\n| --- | ---: |\n| o is right | 200 |\n");
/// ```
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Row>,
}

#[derive(Clone, Debug)]
enum Row {
    Cells(Vec<String>),
    Section(String),
}

impl Table {
    /// A table without rows.
    pub fn new<'a>(columns: impl IntoIterator<Item = (&'a str, Align)>) -> Self {
        let columns = columns.into_iter().map(|(header, align)| (header.to_owned(), align)).collect();
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row; cells beyond the columns are dropped, missing ones stay empty.
    pub fn row<C: Into<String>>(&mut self, cells: impl IntoIterator<Item = C>) {
        let mut cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(Row::Cells(cells));
    }

    /// Adds a line of text between rows.
    pub fn section(&mut self, title: impl Into<String>) {
        self.rows.push(Row::Section(title.into()));
    }

    /// The headers, in order.
    pub fn headers(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().map(|(header, _)| header.as_str())
    }

    /// The cells of every row, without the lines between them.
    pub fn cells(&self) -> impl Iterator<Item = &[String]> {
        self.rows.iter().filter_map(|row| match row {
            Row::Cells(cells) => Some(cells.as_slice()),
            Row::Section(_) => None,
        })
    }

    /// As a Markdown table; sections become rows with one bold cell.
    pub fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let rule = |&(_, align): &(String, Align)| if align == Align::Left { "---" } else { "---:" }.to_owned();
        let mut text = line(self.columns.iter().map(|(header, _)| header.clone()).collect());
        text += &line(self.columns.iter().map(rule).collect());
        for row in &self.rows {
            text += &match row {
                Row::Cells(cells) => line(cells.iter().map(|cell| cell.replace('|', "\\|")).collect()),
                Row::Section(title) => {
                    let mut cells = vec![String::new(); self.columns.len()];
                    if let Some(first) = cells.first_mut() {
                        *first = format!("**{title}**");
                    }
                    line(cells)
                }
            };
        }
        text
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|(header, _)| header.chars().count()).collect();
        for row in &self.rows {
            if let Row::Cells(cells) = row {
                for (width, cell) in widths.iter_mut().zip(cells) {
                    *width = (*width).max(cell.chars().count());
                }
            }
        }
        widths
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let write_cells = |f: &mut fmt::Formatter<'_>, cells: &mut dyn Iterator<Item = &str>| {
            let mut line = String::new();
            for ((cell, &width), (_, align)) in cells.zip(&widths).zip(&self.columns) {
                if !line.is_empty() {
                    line += "  ";
                }
                line += &match align {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                };
            }
            writeln!(f, "{}", line.trim_end())
        };
        write_cells(f, &mut self.columns.iter().map(|(header, _)| header.as_str()))?;
        writeln!(f, "{}", widths.iter().map(|&width| "─".repeat(width)).collect::<Vec<_>>().join("  "))?;
        for row in &self.rows {
            match row {
                Row::Cells(cells) => write_cells(f, &mut cells.iter().map(String::as_str))?,
                Row::Section(title) => writeln!(f, "\n{title}")?,
            }
        }
        Ok(())
    }
}
