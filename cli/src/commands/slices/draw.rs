//! The plan as text: each GPU as rectangles of SMs and time.

use millrace_slices::plan::{GpuPlan, Packing, SlicePlan};
use millrace_slices::rectangles::SIDE;
use millrace_slices::units::Grid;
use millrace_types::{Bytes, SliceId};

use super::document::name;
use super::file::PlanFile;

/// Columns of a picture, each a fiftieth of the window.
const COLUMNS: u16 = 50;
/// Rows of a picture of percentages; a picture of blocks has a row for each unit.
const ROWS: u16 = 25;
const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const FREE: char = '·';
/// The mark of slices beyond the letters.
const MANY: char = '#';

/// Returns both packings.
pub(super) fn text(file: &PlanFile, plan: &SlicePlan, grid: Grid) -> String {
    let rows = match grid {
        Grid::Blocks16 => u16::from(grid.total()),
        Grid::Caps100 => ROWS,
    };
    let sheet = Sheet { file, plan };
    let ours = sheet.packing("Dry run of the token rule", &plan.ours, rows);
    let paper = sheet.packing("Maximal rectangles (the paper)", &plan.paper, ROWS);
    format!("{ours}\n{paper}")
}

struct Sheet<'a> {
    file: &'a PlanFile,
    plan: &'a SlicePlan,
}

impl Sheet<'_> {
    fn packing(&self, title: &str, packing: &Packing, rows: u16) -> String {
        let used = packing.gpus.len();
        let placed = self.plan.slices.len() - packing.refused.len();
        let mut text = format!(
            "{title}: {used} of {} GPUs used, {placed} of {} slices placed\n",
            self.file.gpus.count,
            self.plan.slices.len(),
        );
        for (number, gpu) in packing.gpus.iter().enumerate() {
            text += &self.gpu(number, gpu, rows);
        }
        for (slice, refusal) in &packing.refused {
            text += &format!("refused {}: {refusal}\n", name(self.file, self.plan, *slice));
        }
        text
    }

    fn gpu(&self, number: usize, gpu: &GpuPlan, rows: u16) -> String {
        let memory: u64 = gpu.slices.iter().map(|slice| self.memory(*slice).get()).sum();
        let area: u64 = gpu.picture.iter().map(|(_, it)| u64::from(it.area())).sum();
        let share = area as f64 / f64::from(SIDE) / f64::from(SIDE) * 100.0;
        let mut text = format!(
            "\nGPU {number}   SM time {share:.0}%   memory {} of {}\n",
            Bytes(memory),
            self.file.gpus.memory
        );
        let mut legend = gpu.slices.iter().enumerate().map(|(place, slice)| self.legend(place, *slice));
        for row in (0..rows).rev() {
            let line = format!("{}{}", axis(row, rows), picture_row(gpu, row, rows));
            let line = match legend.next() {
                Some(slice) => format!("{line}   {slice}"),
                None => line,
            };
            text += line.trim_end();
            text.push('\n');
        }
        text += "    └┬─────────┬─────────┬─────────┬─────────┬─────────┐\n";
        text += "     0        200       400       600       800     1000 ms\n";
        for slice in legend {
            text += &format!("     {slice}\n");
        }
        text
    }

    fn memory(&self, slice: SliceId) -> Bytes {
        self.file.orders[self.plan.slices[slice.0 as usize].order].memory
    }

    fn legend(&self, place: usize, slice: SliceId) -> String {
        let terms = self.file.orders[self.plan.slices[slice.0 as usize].order].terms;
        format!(
            "{} {}   {} of the SMs   {} to {} of the time",
            letter(place),
            name(self.file, self.plan, slice),
            terms.least(),
            terms.request(),
            terms.limit()
        )
    }
}

fn letter(place: usize) -> char {
    LETTERS.get(place).map_or(MANY, |letter| char::from(*letter))
}

/// Returns the label of a row: the share of the SMs below the row's upper edge.
fn axis(row: u16, rows: u16) -> String {
    let labels = if rows.is_multiple_of(5) { 5 } else { 4 };
    if (row + 1).is_multiple_of(rows / labels) {
        format!("{:>3} ┤", (row + 1) * 100 / rows)
    } else {
        "    │".to_owned()
    }
}

/// Returns a row of cells, each with the letter of the slice at the cell's centre.
fn picture_row(gpu: &GpuPlan, row: u16, rows: u16) -> String {
    let centre =
        |cell: u16, cells: u16| (u32::from(2 * cell + 1) * u32::from(SIDE) / u32::from(2 * cells)) as u16;
    let y = centre(row, rows);
    let cell = |column: u16| {
        let x = centre(column, COLUMNS);
        let inside = |from: u16, length: u16, at: u16| (from..from + length).contains(&at);
        let at = gpu.picture.iter().find(|(_, it)| inside(it.x, it.width, x) && inside(it.y, it.height, y));
        at.and_then(|(id, _)| gpu.slices.iter().position(|slice| slice == id)).map_or(FREE, letter)
    };
    (0..COLUMNS).map(cell).collect()
}

#[cfg(test)]
mod tests {
    use millrace_slices::rectangles::Rectangle;

    use super::*;

    #[test]
    fn cells_show_the_slice_at_their_centre() {
        let left = Rectangle { x: 0, y: 0, width: 400, height: 500 };
        let upper = Rectangle { x: 400, y: 500, width: 600, height: 500 };
        let gpu = GpuPlan {
            slices: vec![SliceId(7), SliceId(3)],
            picture: vec![(SliceId(3), left), (SliceId(7), upper)],
        };
        let row = |row| picture_row(&gpu, row, 4);
        assert_eq!(row(0), format!("{}{}", "B".repeat(20), "·".repeat(30)));
        assert_eq!(row(3), format!("{}{}", "·".repeat(20), "A".repeat(30)));
    }

    #[test]
    fn rows_are_labelled_with_the_share_of_the_sms_below_them() {
        let labels: Vec<String> = (0..16).map(|row| axis(row, 16)).collect();
        assert_eq!([&*labels[3], &*labels[4], &*labels[15]], [" 25 ┤", "    │", "100 ┤"]);
    }

    #[test]
    fn slices_beyond_the_letters_share_a_mark() {
        assert_eq!([letter(0), letter(51), letter(52)], ['A', 'z', MANY]);
    }
}
