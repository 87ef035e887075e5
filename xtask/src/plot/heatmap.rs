//! Heat maps: grids of coloured cells side by side under one colour scale.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;

use super::charts::failed;

/// One grid: `cell(column, row)`.
pub struct Grid<'a> {
    pub title: String,
    pub width: usize,
    pub height: usize,
    pub cell: &'a dyn Fn(usize, usize) -> f64,
}

/// The colour scale.
pub struct Bar<'a> {
    /// The smallest and the largest value. Values outside this range have the colour of its ends.
    pub range: (f64, f64),
    /// Formats a value of the colour scale.
    pub label: &'a dyn Fn(&f64) -> String,
}

/// Dark blue (cold) over white to dark red (hot), as shares of the range.
const STOPS: [(f64, [f64; 3]); 5] = [
    (0.0, [33.0, 60.0, 130.0]),
    (0.35, [146.0, 190.0, 220.0]),
    (0.5, [247.0, 247.0, 247.0]),
    (0.7, [239.0, 150.0, 110.0]),
    (1.0, [150.0, 10.0, 35.0]),
];

fn colour(value: f64, range: (f64, f64)) -> RGBColor {
    let share = ((value - range.0) / (range.1 - range.0)).clamp(0.0, 1.0);
    let upper = STOPS.iter().position(|s| s.0 >= share).unwrap_or(STOPS.len() - 1).max(1);
    let (a, from) = STOPS[upper - 1];
    let (b, to) = STOPS[upper];
    let mix = (share - a) / (b - a);
    let channel = |i: usize| (from[i] + (to[i] - from[i]) * mix).round() as u8;
    RGBColor(channel(0), channel(1), channel(2))
}

/// Plots `grids` next to each other and a colour bar into an SVG file.
pub fn draw(path: &Path, axes: (&str, &str), grids: &[Grid], bar: &Bar) -> Result<()> {
    let range = bar.range;
    let area = SVGBackend::new(path, (960, 560)).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let (maps, side) = area.split_horizontally(860);
    for (grid, part) in grids.iter().zip(maps.split_evenly((1, grids.len()))) {
        let mut chart = ChartBuilder::on(&part)
            .caption(&grid.title, ("sans-serif", 20))
            .margin(10)
            .x_label_area_size(42)
            .y_label_area_size(58)
            .build_cartesian_2d(-0.5..grid.width as f64 - 0.5, grid.height as f64 - 0.5..-0.5)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc(axes.0)
            .y_desc(axes.1)
            .x_label_formatter(&index)
            .y_label_formatter(&index)
            .label_style(("sans-serif", 13))
            .axis_desc_style(("sans-serif", 15))
            .draw()
            .map_err(failed)?;
        let cells = (0..grid.height).flat_map(|y| (0..grid.width).map(move |x| (x, y)));
        chart
            .draw_series(cells.map(|(x, y)| {
                let column = x as f64;
                let row = y as f64;
                let corners = [(column - 0.5, row - 0.5), (column + 0.5, row + 0.5)];
                Rectangle::new(corners, colour((grid.cell)(x, y), range).filled())
            }))
            .map_err(failed)?;
    }
    let mut scale = ChartBuilder::on(&side)
        .margin_top(44)
        .margin_bottom(52)
        .margin_right(12)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..1.0, range.0..range.1)
        .map_err(failed)?;
    scale
        .configure_mesh()
        .disable_mesh()
        .disable_x_axis()
        .y_label_formatter(bar.label)
        .label_style(("sans-serif", 13))
        .draw()
        .map_err(failed)?;
    let step = (range.1 - range.0) / 64.0;
    scale
        .draw_series((0..64).map(|i| {
            let low = range.0 + step * f64::from(i);
            Rectangle::new([(0.0, low), (1.0, low + step)], colour(low + step / 2.0, range).filled())
        }))
        .map_err(failed)?;
    area.present().map_err(failed)
}

/// Labels the middle of a cell, and nothing between two cells.
fn index(value: &f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { String::new() }
}
