//! Aligned columns without rules, like the output of `kubectl`: easy to read and to cut.

use crate::output::format::ListFormat;

/// The number of spaces between columns.
const GAP: usize = 3;

/// A column's heading and visibility.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TextColumn {
    heading: &'static str,
    wide_only: ColumnVisibility,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnVisibility {
    Always,
    WideOnly,
}

/// Returns a column that is always shown.
pub(crate) const fn col(heading: &'static str) -> TextColumn {
    TextColumn { heading, wide_only: ColumnVisibility::Always }
}

/// Returns a column that is shown only with `-o wide`.
pub(crate) const fn wide(heading: &'static str) -> TextColumn {
    TextColumn { heading, wide_only: ColumnVisibility::WideOnly }
}

/// A table of rows under headings.
#[derive(Debug)]
pub(crate) struct TextTable {
    columns: Vec<TextColumn>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub(crate) fn new(columns: impl Into<Vec<TextColumn>>) -> Self {
        Self { columns: columns.into(), rows: Vec::new() }
    }

    /// Adds a row with a cell for each column, including hidden columns.
    pub(crate) fn row(&mut self, cells: impl Into<Vec<String>>) {
        let cells = cells.into();
        debug_assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Formats the table as lines. An empty cell is printed as `-`.
    pub(crate) fn render(&self, format: ListFormat) -> String {
        let shown: Vec<usize> = (0..self.columns.len())
            .filter(|&index| {
                format == ListFormat::Wide || self.columns[index].wide_only == ColumnVisibility::Always
            })
            .collect();
        let cell = |row: &[String], index: usize| match row[index].as_str() {
            "" => "-".to_owned(),
            text => text.to_owned(),
        };
        let headings = shown.iter().map(|&index| self.columns[index].heading.to_owned()).collect();
        let rows = self.rows.iter().map(|row| shown.iter().map(|&index| cell(row, index)).collect());
        let lines: Vec<Vec<String>> = std::iter::once(headings).chain(rows).collect();
        let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..shown.len()).map(width).collect();
        lines.iter().map(|line| aligned(line, &widths)).collect()
    }
}

fn aligned(cells: &[String], widths: &[usize]) -> String {
    let mut line = String::new();
    for (cell, width) in cells.iter().zip(widths) {
        line += &format!("{cell:<width$}{:GAP$}", "");
    }
    line.truncate(line.trim_end().len());
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_wide_columns_are_hidden() {
        let mut table = TextTable::new([col("NAME"), wide("DIGEST"), col("READY")]);
        table.row(["digits".into(), "abc".into(), "True".into()]);
        table.row(["x".into(), "def".into(), String::new()]);
        assert_eq!(table.render(ListFormat::Table), "NAME     READY\ndigits   True\nx        -\n");
        assert_eq!(
            table.render(ListFormat::Wide),
            "NAME     DIGEST   READY\ndigits   abc      True\nx        def      -\n"
        );
    }
}
