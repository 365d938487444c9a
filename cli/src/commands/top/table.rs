//! Tables that can be sorted and filtered, independent of their content.

use std::cmp::Ordering;

/// The emphasis of a cell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Tone {
    #[default]
    Plain,
    /// The value needs no attention.
    Quiet,
    Good,
    Warning,
    Bad,
}

/// A cell of a table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cell {
    pub(super) text: String,
    /// The sort key. `None` sorts by the text.
    by: Option<f64>,
    pub(super) tone: Tone,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), by: None, tone: Tone::Plain }
    }

    /// Returns a cell with a quantity, formatted as `text`.
    pub(super) fn number(by: f64, text: impl Into<String>) -> Self {
        Self { text: text.into(), by: Some(by), tone: Tone::Plain }
    }

    /// Returns a cell with an unknown quantity.
    pub(super) fn unknown() -> Self {
        Self { text: "-".to_owned(), by: Some(f64::NEG_INFINITY), tone: Tone::Quiet }
    }

    pub(super) fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A row of a table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PaneRow {
    /// The id of the row, stable across samples.
    pub(super) id: String,
    pub(super) cells: Vec<Cell>,
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct PaneColumn {
    pub(super) heading: &'static str,
    pub(super) width: ColumnWidth,
}

/// The width of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ColumnWidth {
    /// A fixed width, with the content on the left.
    Words(u16),
    /// A fixed width, with the content on the right.
    Number(u16),
    /// A share of the remaining width.
    Rest(u16),
}

/// A table with its columns and rows.
#[derive(Debug, Clone)]
pub(super) struct SortableTable {
    pub(super) columns: &'static [PaneColumn],
    pub(super) rows: Vec<PaneRow>,
}

/// The order of a table's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SortOrder {
    pub(super) column: usize,
    /// Whether the order is reversed. By default, quantities are sorted in descending order and
    /// words in ascending order.
    pub(super) reversed: bool,
}

impl SortableTable {
    /// Returns the rows that pass a filter, in order. Equal rows keep their relative order.
    pub(super) fn arranged(&self, filter: &str, order: Option<SortOrder>) -> Vec<&PaneRow> {
        let filter = filter.to_lowercase();
        let contains = |cell: &Cell| cell.text.to_lowercase().contains(&filter);
        let passes =
            |row: &&PaneRow| row.id.to_lowercase().contains(&filter) || row.cells.iter().any(contains);
        let mut rows: Vec<&PaneRow> = self.rows.iter().filter(passes).collect();
        if let Some(SortOrder { column, reversed }) = order {
            rows.sort_by(|a, b| {
                let usual = compare(&a.cells[column], &b.cells[column]);
                if reversed { usual.reverse() } else { usual }
            });
        }
        rows
    }
}

fn compare(a: &Cell, b: &Cell) -> Ordering {
    match (a.by, b.by) {
        (Some(a), Some(b)) => b.total_cmp(&a),
        _ => a.text.cmp(&b.text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[PaneColumn] = &[
        PaneColumn { heading: "NAME", width: ColumnWidth::Rest(1) },
        PaneColumn { heading: "RATE", width: ColumnWidth::Number(6) },
    ];

    fn sheet() -> SortableTable {
        let row = |name: &str, rate| PaneRow { id: format!("t/{name}"), cells: vec![Cell::text(name), rate] };
        let number = |by: f64| Cell::number(by, by.to_string());
        let rows = vec![row("b", number(9.0)), row("a", number(10.0)), row("c", Cell::unknown())];
        SortableTable { columns: COLUMNS, rows }
    }

    fn names(filter: &str, order: Option<(usize, bool)>) -> String {
        let order = order.map(|(column, reversed)| SortOrder { column, reversed });
        sheet().arranged(filter, order).iter().map(|row| row.cells[0].text.as_str()).collect()
    }

    #[test]
    fn quantities_are_sorted_in_descending_and_words_in_ascending_order() {
        assert_eq!(names("", None), "bac");
        assert_eq!(names("", Some((0, false))), "abc");
        assert_eq!(names("", Some((1, false))), "abc", "10 precedes 9, and an unknown quantity comes last");
        assert_eq!(names("", Some((1, true))), "cba");
    }

    #[test]
    fn a_filter_matches_ids_and_cells_and_ignores_case() {
        assert_eq!(names("T/", None), "bac");
        assert_eq!(names("10", None), "a");
        assert_eq!(names("nobody", None), "");
    }
}
