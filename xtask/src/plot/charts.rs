//! Line charts.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// A line, or points.
pub struct Series {
    name: String,
    values: Vec<(f64, f64)>,
    line: bool,
}

impl Series {
    pub fn line(name: &str, values: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), values, line: true }
    }

    pub fn points(name: &str, values: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), values, line: false }
    }
}

/// The text around the curves.
pub struct Frame<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    /// A place where the curves leave room for their names.
    pub legend: SeriesLabelPosition,
}

/// Colours that colour-blind readers can distinguish.
const COLOURS: [RGBColor; 3] = [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115)];

/// Plots `series` into an SVG file.
pub fn draw(path: &Path, frame: Frame, series: &[Series]) -> Result<()> {
    let points = || series.iter().flat_map(|s| &s.values);
    let range = |value: fn(&(f64, f64)) -> f64| {
        let low = points().map(value).fold(f64::INFINITY, f64::min);
        let high = points().map(value).fold(f64::NEG_INFINITY, f64::max);
        let margin = ((high - low) * 0.04).max(high.abs() * 1e-3);
        (low - margin)..(high + margin)
    };
    if points().next().is_none() {
        return Err(anyhow!("there is nothing to plot for {}", path.display()));
    }
    let area = SVGBackend::new(path, (960, 560)).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut builder = ChartBuilder::on(&area);
    builder.caption(frame.title, ("sans-serif", 22)).margin(14).x_label_area_size(46).y_label_area_size(72);
    let mut chart = builder.build_cartesian_2d(range(|p| p.0), range(|p| p.1)).map_err(failed)?;
    let short =
        |v: &f64| if v.abs() >= 100.0 { format!("{v:.0}") } else { format!("{}", (v * 1e3).round() / 1e3) };
    chart
        .configure_mesh()
        .x_desc(frame.x)
        .y_desc(frame.y)
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        .x_labels(6)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 16))
        .light_line_style(RGBColor(240, 240, 240))
        .draw()
        .map_err(failed)?;
    for (i, s) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        if s.line {
            let line = LineSeries::new(s.values.iter().copied(), colour.stroke_width(2));
            let drawn = chart.draw_series(line).map_err(failed)?;
            drawn
                .label(&s.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
        } else {
            let dots = s.values.iter().map(|&p| Circle::new(p, 3, colour.filled()));
            let drawn = chart.draw_series(dots).map_err(failed)?;
            drawn.label(&s.name).legend(move |(x, y)| Circle::new((x + 10, y), 3, colour.filled()));
        }
    }
    chart
        .configure_series_labels()
        .position(frame.legend)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 14))
        .draw()
        .map_err(failed)?;
    area.present().map_err(failed)
}

/// Plotting errors borrow the plotting area, so only their text is kept.
pub fn failed<E: std::fmt::Display>(error: E) -> anyhow::Error {
    anyhow!("cannot make the plot: {error}")
}
