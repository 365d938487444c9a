//! The rendering on a terminal.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, BorderType, Cell as Place, Paragraph, Row as Lines, Table, TableState, Wrap};

use super::dashboard::Dashboard;
use super::detail::detail;
use super::pane::Pane;
use super::sample::{EventLog, SampleHistory};
use super::table::{Cell, ColumnWidth, PaneColumn, Tone};
use super::view::{Mode, PaneSelection};

/// The number of lines that all panes together need. With fewer lines, only the front pane is
/// shown.
const ALL_PANES_MIN: u16 = 26;
/// The number of lines of the head.
const HEAD: u16 = 3;
/// The mark of the column by which a pane is sorted.
const MARK: &str = "▸";

const DETAIL_KEYS: &str = "↑↓ scroll · esc back · q quit";
const KEYS: &str = "tab 1-4 pane · ↑↓ row · enter details · s sort · r reverse · / filter · p pause · q quit";

/// The data to draw.
pub(super) struct Scene<'a> {
    pub(super) history: &'a SampleHistory,
    pub(super) events: &'a EventLog,
    pub(super) picture: Option<&'a Dashboard>,
    pub(super) view: &'a PaneSelection,
    /// The error that keeps the picture from being current.
    pub(super) trouble: Option<&'a str>,
}

impl Scene<'_> {
    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([Constraint::Length(HEAD), Constraint::Fill(1), Constraint::Length(1)]);
        let [head, body, foot] = areas.areas(frame.area());
        self.draw_foot(frame, foot);
        let Some(picture) = self.picture else {
            frame.render_widget(Paragraph::new("waiting for the cluster"), head);
            return;
        };
        let lines = picture.head.iter().map(|(text, tone)| Line::styled(text.clone(), style(*tone)));
        frame.render_widget(Text::from_iter(lines), head);
        if let Mode::Detail { id, scrolled } = &self.view.mode {
            return self.draw_detail(frame, body, id, *scrolled);
        }
        if body.height < ALL_PANES_MIN {
            return self.draw_pane(frame, body, picture, self.view.pane);
        }
        let share = |pane: Pane| match pane {
            pane if pane == self.view.pane => Constraint::Fill(4),
            Pane::Gpus | Pane::Functions => Constraint::Fill(2),
            Pane::Links | Pane::Events => Constraint::Fill(1),
        };
        let areas = Layout::vertical(Pane::ALL.map(share)).areas::<{ Pane::ALL.len() }>(body);
        for (pane, area) in Pane::ALL.into_iter().zip(areas) {
            self.draw_pane(frame, area, picture, pane);
        }
    }

    fn draw_pane(&self, frame: &mut Frame<'_>, area: Rect, picture: &Dashboard, pane: Pane) {
        let (rows, marked) = self.view.rows(picture, pane);
        let sheet = picture.sheet(pane);
        let order = self.view.order(pane);
        let in_front = pane == self.view.pane;
        let heading = |(at, column): (usize, &PaneColumn)| {
            let mark = if order.is_some_and(|order| order.column == at) { MARK } else { "" };
            let text = Line::from(format!("{mark}{}", column.heading));
            Place::from(text.alignment(alignment(column)))
        };
        let header = Lines::from_iter(sheet.columns.iter().enumerate().map(heading));
        let lines = rows.iter().map(|row| {
            let cells = row.cells.iter().zip(sheet.columns);
            Lines::from_iter(cells.map(|(cell, column)| place(cell, column)))
        });
        let title = format!(" {} {} ({}) ", pane as usize + 1, pane.name(), rows.len());
        let (border, title_style) = match in_front {
            true => (BorderType::Thick, Style::new().add_modifier(Modifier::BOLD)),
            false => (BorderType::Plain, style(Tone::Quiet)),
        };
        let block = Block::bordered().border_type(border).title(Span::styled(title, title_style));
        let table = Table::new(lines, sheet.columns.iter().map(width))
            .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
            .block(block);
        let mut state = TableState::new().with_selected(in_front.then_some(marked));
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn draw_detail(&self, frame: &mut Frame<'_>, area: Rect, id: &str, scrolled: u16) {
        let lines = detail(self.view.pane, id, self.history, self.events).into_iter();
        let lines = lines.map(|(text, tone)| Line::styled(text, style(tone)));
        let block = Block::bordered().border_type(BorderType::Thick).title(format!(" {id} · esc: back "));
        let text = Paragraph::new(Text::from_iter(lines)).wrap(Wrap { trim: false });
        frame.render_widget(text.scroll((scrolled, 0)).block(block), area);
    }

    fn draw_foot(&self, frame: &mut Frame<'_>, area: Rect) {
        let (text, tone) = match (&self.view.mode, self.trouble) {
            (Mode::Filter, _) => {
                (format!("filter: {}▏ enter: keep · esc: none", self.view.filter), Tone::Plain)
            }
            (_, Some(trouble)) => (format!("out of date: {trouble}"), Tone::Bad),
            (Mode::Detail { .. }, None) => (DETAIL_KEYS.to_owned(), Tone::Quiet),
            _ if self.view.paused => (format!("PAUSED · {KEYS}"), Tone::Warning),
            _ if !self.view.filter.is_empty() => {
                (format!("filter: {} (esc: none) · {KEYS}", self.view.filter), Tone::Warning)
            }
            _ => (KEYS.to_owned(), Tone::Quiet),
        };
        frame.render_widget(Line::styled(text, style(tone)), area);
    }
}

fn place(cell: &Cell, column: &PaneColumn) -> Place<'static> {
    let line = Line::styled(cell.text.clone(), style(cell.tone));
    Place::from(line.alignment(alignment(column)))
}

fn alignment(column: &PaneColumn) -> Alignment {
    if matches!(column.width, ColumnWidth::Number(_)) { Alignment::Right } else { Alignment::Left }
}

fn width(column: &PaneColumn) -> Constraint {
    match column.width {
        ColumnWidth::Words(width) | ColumnWidth::Number(width) => Constraint::Length(width),
        ColumnWidth::Rest(part) => Constraint::Fill(part),
    }
}

/// Returns the style of a tone, in colours of the terminal's palette, which are readable on its
/// background.
fn style(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::new(),
        Tone::Quiet => Style::new().add_modifier(Modifier::DIM),
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Warning => Style::new().fg(Color::Yellow),
        Tone::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::fixture::history;
    use super::*;

    fn seen(pane: Pane, mode: Mode, filter: &str) -> PaneSelection {
        let mut view = PaneSelection::default();
        (view.pane, view.mode, view.filter) = (pane, mode, filter.to_owned());
        view
    }

    fn screen(width: u16, height: u16, view: &PaneSelection, trouble: Option<&str>) -> String {
        let (history, events) = history();
        let picture = Dashboard::of(&history, &events);
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let scene = Scene { history: &history, events: &events, picture: picture.as_ref(), view, trouble };
        terminal.draw(|frame| scene.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_large_terminal_shows_all_panes_and_a_small_terminal_only_the_front_pane() {
        let large = screen(160, 40, &PaneSelection::default(), None);
        for part in ["1 GPUs (1)", "2 Functions (3)", "3 Links (1)", "4 Events (2)", "▸REQ/S", "q quit"] {
            assert!(large.contains(part), "{part} in\n{large}");
        }
        let small = screen(100, 14, &PaneSelection::default(), None);
        assert!(small.contains("2 Functions (3)") && !small.contains("GPUs (1)"), "{small}");
        assert!(small.contains("default/digits") && small.contains("controller 1 leads"), "{small}");
    }

    #[test]
    fn drawing_never_panics_at_any_size() {
        for (width, height) in [(1, 1), (10, 3), (20, 5), (300, 90)] {
            screen(width, height, &PaneSelection::default(), None);
            let mode = Mode::Detail { id: "default/digits".into(), scrolled: 200 };
            screen(width, height, &seen(Pane::Functions, mode, ""), None);
        }
    }

    #[test]
    fn stale_paused_and_filtered_pictures_are_marked() {
        let text = screen(100, 14, &PaneSelection::default(), Some("no controller answers"));
        assert!(text.contains("out of date: no controller answers"), "{text}");
        let mut paused = PaneSelection::default();
        paused.paused = true;
        assert!(screen(100, 14, &paused, None).contains("PAUSED"));
        let filtered = seen(Pane::Functions, Mode::Filter, "digi");
        let text = screen(100, 14, &filtered, None);
        assert!(text.contains("filter: digi") && !text.contains("default/quiet"), "{text}");
    }

    #[test]
    fn details_replace_the_panes() {
        let mode = Mode::Detail { id: "worker-1/1".into(), scrolled: 0 };
        let text = screen(120, 30, &seen(Pane::Gpus, mode, ""), None);
        assert!(text.contains("default/digits@1: running") && !text.contains("Functions (3)"), "{text}");
    }
}
