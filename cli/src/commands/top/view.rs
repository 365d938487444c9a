//! The user's selection in `top`, and the keys that change it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::dashboard::Dashboard;
use super::pane::Pane;
use super::table::{PaneRow, SortOrder};

/// The number of rows that a page key moves by.
const PAGE: usize = 10;

/// The user's selection.
#[derive(Debug, Clone)]
pub(super) struct PaneSelection {
    pub(super) pane: Pane,
    orders: [Option<SortOrder>; Pane::ALL.len()],
    /// The index of the marked row in each pane.
    marked: [usize; Pane::ALL.len()],
    /// The text that rows must contain.
    pub(super) filter: String,
    pub(super) mode: Mode,
    pub(super) paused: bool,
}

/// The meaning of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    /// Keys move between panes and rows.
    Browse,
    /// Keys edit the filter.
    Filter,
    /// Keys scroll the details of one row, shown from this line on.
    Detail { id: String, scrolled: u16 },
}

/// The effect of a key on the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyEffect {
    Go,
    Quit,
}

impl Default for PaneSelection {
    fn default() -> Self {
        // Events are already in order.
        let by = |column| Some(SortOrder { column, reversed: false });
        Self {
            pane: Pane::Functions,
            orders: [None, by(1), by(2), None],
            marked: [0; Pane::ALL.len()],
            filter: String::new(),
            mode: Mode::Browse,
            paused: false,
        }
    }
}

impl PaneSelection {
    pub(super) fn order(&self, pane: Pane) -> Option<SortOrder> {
        self.orders[pane as usize]
    }

    /// Returns the rows of a pane, filtered and sorted, and the index of the marked row.
    pub(super) fn rows<'a>(&self, picture: &'a Dashboard, pane: Pane) -> (Vec<&'a PaneRow>, usize) {
        let rows = picture.sheet(pane).arranged(&self.filter, self.order(pane));
        let marked = self.marked[pane as usize].min(rows.len().saturating_sub(1));
        (rows, marked)
    }

    /// Handles a key.
    pub(super) fn press(&mut self, key: KeyEvent, picture: Option<&Dashboard>) -> KeyEffect {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return KeyEffect::Quit;
        }
        match &mut self.mode {
            Mode::Filter => self.write(key.code),
            Mode::Detail { scrolled, .. } => match key.code {
                KeyCode::Char('q') => return KeyEffect::Quit,
                KeyCode::Up | KeyCode::Char('k') => *scrolled = scrolled.saturating_sub(1),
                KeyCode::Down | KeyCode::Char('j') => *scrolled = scrolled.saturating_add(1),
                KeyCode::Esc | KeyCode::Enter | KeyCode::Backspace => self.mode = Mode::Browse,
                _ => {}
            },
            Mode::Browse => return self.browse(key.code, picture),
        }
        KeyEffect::Go
    }

    fn write(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.mode = Mode::Browse,
            KeyCode::Esc => (self.mode, self.filter) = (Mode::Browse, String::new()),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
    }

    fn browse(&mut self, key: KeyCode, picture: Option<&Dashboard>) -> KeyEffect {
        match key {
            KeyCode::Char('q') => return KeyEffect::Quit,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Tab | KeyCode::Right => self.turn(1),
            KeyCode::BackTab | KeyCode::Left => self.turn(Pane::ALL.len() - 1),
            KeyCode::Char(digit @ '1'..='4') => self.pane = Pane::ALL[digit as usize - '1' as usize],
            _ => {
                if let Some(picture) = picture {
                    self.browse_rows(key, picture);
                }
            }
        }
        KeyEffect::Go
    }

    fn browse_rows(&mut self, key: KeyCode, picture: &Dashboard) {
        let (rows, marked) = self.rows(picture, self.pane);
        let last = rows.len().saturating_sub(1);
        let to = match key {
            KeyCode::Up | KeyCode::Char('k') => marked.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => (marked + 1).min(last),
            KeyCode::PageUp => marked.saturating_sub(PAGE),
            KeyCode::PageDown => (marked + PAGE).min(last),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => last,
            KeyCode::Enter => {
                if let Some(row) = rows.get(marked) {
                    self.mode = Mode::Detail { id: row.id.clone(), scrolled: 0 };
                }
                return;
            }
            KeyCode::Char('s') => return self.sort_by_next(picture),
            KeyCode::Char('r') => {
                if let Some(order) = &mut self.orders[self.pane as usize] {
                    order.reversed = !order.reversed;
                }
                return;
            }
            _ => return,
        };
        self.marked[self.pane as usize] = to;
    }

    fn turn(&mut self, by: usize) {
        self.pane = Pane::ALL[(self.pane as usize + by) % Pane::ALL.len()];
    }

    /// Sorts by the next column. After the last column, restores the original order.
    fn sort_by_next(&mut self, picture: &Dashboard) {
        let order = &mut self.orders[self.pane as usize];
        let next = order.map_or(0, |order| order.column + 1);
        let there = next < picture.sheet(self.pane).columns.len();
        *order = there.then_some(SortOrder { column: next, reversed: false });
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::history;
    use super::*;

    fn press(view: &mut PaneSelection, keys: &str) -> KeyEffect {
        let (history, events) = history();
        let picture = Dashboard::of(&history, &events).unwrap();
        let mut then = KeyEffect::Go;
        for letter in keys.chars() {
            let code = match letter {
                '\t' => KeyCode::Tab,
                '\n' => KeyCode::Enter,
                '\x1b' => KeyCode::Esc,
                '\x08' => KeyCode::Backspace,
                letter => KeyCode::Char(letter),
            };
            then = view.press(KeyEvent::new(code, KeyModifiers::NONE), Some(&picture));
        }
        then
    }

    #[test]
    fn keys_select_panes_and_mark_rows_within_bounds() {
        let mut view = PaneSelection::default();
        assert_eq!(press(&mut view, "\t\t"), KeyEffect::Go);
        assert_eq!(view.pane, Pane::Events);
        press(&mut view, "jjjj");
        let (history, events) = history();
        let picture = Dashboard::of(&history, &events).unwrap();
        assert_eq!(view.rows(&picture, Pane::Events).1, 1, "there are two events");
        press(&mut view, "\tk");
        assert_eq!((view.pane, view.rows(&picture, Pane::Gpus).1), (Pane::Gpus, 0));
        press(&mut view, "3");
        assert_eq!(view.pane, Pane::Links);
        assert_eq!(press(&mut view, "q"), KeyEffect::Quit);
    }

    #[test]
    fn a_filter_can_be_edited_kept_and_cleared() {
        let mut view = PaneSelection::default();
        press(&mut view, "/qu1\x08\n");
        assert_eq!((view.filter.as_str(), &view.mode), ("qu", &Mode::Browse));
        let (history, events) = history();
        let picture = Dashboard::of(&history, &events).unwrap();
        let (rows, _) = view.rows(&picture, Pane::Functions);
        assert_eq!(rows.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), ["default/quiet"]);
        press(&mut view, "\x1b");
        assert_eq!(view.filter, "");
        press(&mut view, "/x\x1b");
        assert_eq!((view.filter.as_str(), &view.mode), ("", &Mode::Browse));
    }

    #[test]
    fn sorting_cycles_through_the_columns_and_back_to_none() {
        let mut view = PaneSelection::default();
        press(&mut view, "4r");
        assert_eq!(view.order(Pane::Events), None);
        press(&mut view, "sr");
        assert_eq!(view.order(Pane::Events), Some(SortOrder { column: 0, reversed: true }));
        press(&mut view, "ssss");
        assert_eq!(view.order(Pane::Events), None);
    }

    #[test]
    fn enter_shows_the_details_and_escape_hides_them() {
        let mut view = PaneSelection::default();
        press(&mut view, "\njj");
        assert_eq!(view.mode, Mode::Detail { id: "default/digits".into(), scrolled: 2 });
        press(&mut view, "\x1b");
        assert_eq!(view.mode, Mode::Browse);
    }

    #[test]
    fn control_c_quits_in_every_mode() {
        for keys in ["", "/ab", "\n"] {
            let mut view = PaneSelection::default();
            press(&mut view, keys);
            let key = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
            assert_eq!(view.press(key, None), KeyEffect::Quit);
        }
    }
}
