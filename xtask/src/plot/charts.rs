//! Line charts.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;

/// One curve.
pub struct Series {
    pub name: String,
    pub values: Vec<(f64, f64)>,
    line: bool,
    dots: bool,
}

impl Series {
    pub fn line(name: &str, values: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), values, line: true, dots: false }
    }

    pub fn points(name: &str, values: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), values, line: false, dots: true }
    }

    pub fn marked(name: &str, values: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), values, line: true, dots: true }
    }
}

/// The text around the curves.
pub struct Frame<'a> {
    pub title: &'a str,
    pub x: &'a str,
    pub y: &'a str,
    pub scale: Scale,
    /// A place where the curves leave room for their names.
    pub legend: SeriesLabelPosition,
}

/// Axes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Linear,
    Logarithmic,
}

/// Colours that colour-blind readers can distinguish.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(150, 120, 60),
];

/// Plots `series` into an SVG file.
pub fn draw(path: &Path, frame: Frame, series: &[Series]) -> Result<()> {
    let points = || series.iter().flat_map(|s| &s.values);
    let range = |value: fn(&(f64, f64)) -> f64| {
        let low = points().map(value).fold(f64::INFINITY, f64::min);
        let high = points().map(value).fold(f64::NEG_INFINITY, f64::max);
        let margin = ((high - low) * 0.04).max(high.abs() * 1e-3);
        match frame.scale {
            Scale::Linear => (low - margin)..(high + margin),
            Scale::Logarithmic => (low / 1.3)..(high * 1.3),
        }
    };
    if points().next().is_none() {
        return Err(anyhow!("there is nothing to plot for {}", path.display()));
    }
    let area = SVGBackend::new(path, (960, 560)).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut builder = ChartBuilder::on(&area);
    builder.caption(frame.title, ("sans-serif", 22)).margin(14).x_label_area_size(46).y_label_area_size(72);
    let x = range(|p| p.0);
    let y = range(|p| p.1);
    match frame.scale {
        Scale::Linear => curves(builder.build_cartesian_2d(x, y).map_err(failed)?, frame, series)?,
        Scale::Logarithmic => {
            curves(builder.build_cartesian_2d(x.log_scale(), y.log_scale()).map_err(failed)?, frame, series)?;
        }
    }
    area.present().map_err(failed)
}

fn curves<'a, X, Y>(
    mut chart: ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    frame: Frame,
    series: &[Series],
) -> Result<()>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let short =
        |v: &f64| if v.abs() >= 100.0 { format!("{v:.0}") } else { format!("{}", (v * 1e3).round() / 1e3) };
    chart
        .configure_mesh()
        .x_desc(frame.x)
        .y_desc(frame.y)
        .x_label_formatter(&short)
        .y_label_formatter(&short)
        // This number is small enough that the labels of a logarithmic axis do not overlap.
        .x_labels(6)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 16))
        .light_line_style(RGBColor(240, 240, 240))
        .draw()
        .map_err(failed)?;
    for (i, s) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        if s.dots {
            let dots = s.values.iter().map(|&p| Circle::new(p, 3, colour.filled()));
            let drawn = chart.draw_series(dots).map_err(failed)?;
            if !s.line {
                drawn.label(&s.name).legend(move |(x, y)| Circle::new((x + 10, y), 3, colour.filled()));
            }
        }
        if s.line {
            let line = LineSeries::new(s.values.iter().copied(), colour.stroke_width(2));
            let drawn = chart.draw_series(line).map_err(failed)?;
            drawn
                .label(&s.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
        }
    }
    chart
        .configure_series_labels()
        .position(frame.legend)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 14))
        .draw()
        .map_err(failed)
}

/// Plotting errors borrow the plotting area, so only their text is kept.
pub fn failed<E: std::fmt::Display>(error: E) -> anyhow::Error {
    anyhow!("cannot make the plot: {error}")
}
