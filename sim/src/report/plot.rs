//! Plots as SVG.

use std::path::{Path, PathBuf};

use plotters::prelude::*;

/// One curve.
#[derive(Debug, Clone, PartialEq)]
pub struct PlotCurve {
    /// The curve's name in the legend.
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// A failure to draw a plot into a file.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw {path}: {why}", path = path.display())]
pub struct PlotError {
    pub path: PathBuf,
    pub why: String,
}

const SIZE: (u32, u32) = (860, 520);

/// Draws curves into an SVG file. `axes` are the labels of the horizontal and the vertical axis. The vertical
/// axis begins at zero, as does the horizontal axis if the least value is below half of the greatest.
///
/// # Errors
/// Returns [`PlotError`] if the file cannot be written.
pub fn draw_curves(
    path: &Path,
    title: &str,
    axes: (&str, &str),
    lines: &[PlotCurve],
) -> Result<(), PlotError> {
    draw(path, title, axes.0, axes.1, lines)
        .map_err(|error| PlotError { path: path.to_owned(), why: error.to_string() })
}

fn draw(
    path: &Path,
    title: &str,
    across: &str,
    up: &str,
    lines: &[PlotCurve],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || lines.iter().flat_map(|line| line.points.iter().copied());
    let least_x = points().map(|(x, _)| x).fold(f64::MAX, f64::min).min(f64::MAX);
    let (most_x, most_y) = points().fold((0.0_f64, 0.0_f64), |(a, b), (x, y)| (a.max(x), b.max(y)));
    let left = if least_x < most_x * 0.5 { 0.0 } else { least_x };
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(left..most_x.max(left + 1e-9), 0.0..(most_y * 1.05).max(1e-9))?;
    chart
        .configure_mesh()
        .x_desc(across)
        .y_desc(up)
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    for (place, line) in lines.iter().enumerate() {
        let colour = Palette99::pick(place).to_rgba();
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(line.points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    root.present()?;
    Ok(())
}
