//! Drawings as SVG. Each is readable without colour: by shape, pattern, lightness and label.

use super::Quantity;
use crate::suite::Measured;
use crate::suite::measure::{Run, Sample};
use crate::suite::moving::Moving;
use crate::suite::picture::{KINDS, Picture};
use crate::units::{GIB, MIB};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Dark on white, by lightness alone.
const INK: RGBColor = RGBColor(20, 30, 48);
const MIDDLE: RGBColor = RGBColor(110, 125, 150);
const LIGHT: RGBColor = RGBColor(222, 226, 233);
/// xseg's bars.
const OWN: RGBColor = RGBColor(0, 90, 156);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A drawing of `size` pixels, as an SVG element that scales with the page.
fn svg(size: (u32, u32), name: &str, draw: impl FnOnce(&Area<'_>) -> Result<(), String>) -> Result<String, String> {
    let mut out = String::new();
    {
        let area = SVGBackend::with_string(&mut out, size).into_drawing_area();
        draw(&area)?;
        area.present().map_err(text)?;
    }
    // The size in pixels gives way to the page's; a title is what screen readers say.
    let fixed = format!("<svg width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\"", size.0, size.1);
    let fluid = format!("<svg role=\"img\" viewBox=\"0 0 {} {}\"", size.0, size.1);
    let Some(start) = out.find("<svg") else { return Err("the drawing is no SVG".to_owned()) };
    let drawn = out[start..].replacen(&fixed, &fluid, 1);
    let titled = drawn.replacen(">\n", &format!("><title>{}</title>\n", super::html::escape(name)), 1);
    // What the page's style says once, and line breaks that nobody reads.
    let mut bare = titled.replace('\n', "").replace(" opacity=\"1\"", "").replace(" font-family=\"sans-serif\"", "");
    // Colours are the page's, which has them for light and for dark.
    for (colour, name) in
        [(INK, "ink"), (MIDDLE, "middle"), (LIGHT, "light"), (OWN, "own"), (WHITE, "paper"), (BLACK, "ink")]
    {
        let fixed = format!("\"#{:02X}{:02X}{:02X}\"", colour.0, colour.1, colour.2);
        bare = bare.replace(&fixed, &format!("\"var(--{name})\""));
    }
    Ok(bare)
}

fn style(size: u32) -> TextStyle<'static> {
    // The library's unit is smaller than a pixel.
    (FONT, size * 5 / 4).into_font().color(&INK)
}

fn label(area: &Area<'_>, words: &str, at: (i32, i32), size: u32, anchor: HPos) -> Result<(), String> {
    let style = style(size).pos(Pos::new(anchor, VPos::Center));
    area.draw(&Text::new(words.to_owned(), at, style)).map_err(text)
}

fn rectangle(area: &Area<'_>, from: (i32, i32), to: (i32, i32), fill: Option<&RGBColor>) -> Result<(), String> {
    if let Some(fill) = fill {
        area.draw(&Rectangle::new([from, to], fill.filled())).map_err(text)?;
    }
    area.draw(&Rectangle::new([from, to], INK.stroke_width(1))).map_err(text)
}

/// Slanted lines inside a rectangle.
fn hatch(area: &Area<'_>, from: (i32, i32), to: (i32, i32)) -> Result<(), String> {
    let height = to.1 - from.1;
    for start in (from.0 - height..to.0).step_by(6) {
        // From the lower left to the upper right, cut at both sides.
        let left = start.max(from.0);
        let right = (start + height).min(to.0);
        if left < right {
            let line = [(left, to.1 - (left - start)), (right, to.1 - (right - start))];
            area.draw(&PathElement::new(line, WHITE.stroke_width(2))).map_err(text)?;
        }
    }
    Ok(())
}

/// Memory over time: reserved as an area, allocated as a dashed line, requested as a line. What is above `top` bytes is
/// cut off, and the caption says how far it goes.
pub(super) fn memory(name: &str, run: &Run, top: u64) -> Result<String, String> {
    let seconds = |sample: &Sample| sample.time_us as f64 / 1e6;
    let start = run.samples.first().map_or(0.0, seconds);
    let end = run.samples.last().map_or(1.0, seconds).max(start + 1e-6);
    let most = run.samples.iter().map(|sample| sample.reserved).max().unwrap_or(0);
    let top_gib = (top as f64 / GIB as f64).max(1e-6);
    let curve = |of: fn(&Sample) -> u64| {
        let point = move |sample: &Sample| (seconds(sample), (of(sample) as f64 / GIB as f64).min(top_gib));
        run.samples.iter().map(point).collect::<Vec<_>>()
    };
    let caption = if most > top {
        format!("{name}, cut off: up to {:.1} GiB", most as f64 / GIB as f64)
    } else {
        name.to_owned()
    };
    svg((330, 204), &format!("memory over time, {name}"), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(4)
            .margin_right(12)
            .caption(caption, style(14))
            .x_label_area_size(44)
            .y_label_area_size(46)
            .build_cartesian_2d(start..end, 0.0..top_gib)
            .map_err(text)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_labels(4)
            .y_labels(6)
            .x_desc("time, s")
            .y_desc("GiB")
            .label_style(style(11))
            .axis_desc_style(style(11))
            .draw()
            .map_err(text)?;
        let mut area: Vec<(f64, f64)> = vec![(start, 0.0)];
        area.extend(curve(|sample| sample.reserved));
        area.push((end, 0.0));
        chart.draw_series([Polygon::new(area, LIGHT.filled())]).map_err(text)?;
        let reserved = curve(|sample| sample.reserved);
        chart.draw_series(LineSeries::new(reserved, MIDDLE.stroke_width(1))).map_err(text)?;
        let allocated = curve(|sample| sample.allocated);
        chart.draw_series(DashedLineSeries::new(allocated, 4, 3, OWN.stroke_width(2))).map_err(text)?;
        let requested = curve(|sample| sample.requested);
        chart.draw_series(LineSeries::new(requested, INK.stroke_width(1))).map_err(text)?;
        Ok(())
    })
}

/// How each kind of addresses is filled: its name, its colour, hatched or not.
const FILLS: [(&str, Option<RGBColor>, bool); KINDS] = [
    ("blocks", Some(INK), false),
    ("blocks on moved memory", Some(OWN), true),
    ("holes", Some(LIGHT), false),
    ("left behind by a move", Some(MIDDLE), true),
    ("unmapped", None, false),
];

/// The address space as columns, each filled from the bottom by kind.
pub(super) fn addresses(name: &str, picture: &Picture) -> Result<String, String> {
    const HEIGHT: i32 = 64;
    let width = 4 * picture.columns.len() as i32;
    svg((width as u32 + 40, HEIGHT as u32 + 30), &format!("address space, {name}"), |area| {
        let mut below = vec![0f32; picture.columns.len()];
        for (kind, (_, fill, hatched)) in FILLS.iter().enumerate() {
            let Some(fill) = fill.as_ref().filter(|_| picture.bytes[kind] > 0) else { continue };
            // One outline over all columns: up along the tops, back along the bottoms.
            let y = |share: f32| 4 + HEIGHT - (share.min(1.0) * HEIGHT as f32).round() as i32;
            let (mut tops, mut bottoms) = (Vec::new(), Vec::new());
            for (column, low) in below.iter_mut().enumerate() {
                let high = *low + picture.columns[column][kind];
                let (left, right) = (4 + 4 * column as i32, 8 + 4 * column as i32);
                tops.extend([(left, y(high)), (right, y(high))]);
                bottoms.extend([(left, y(*low)), (right, y(*low))]);
                *low = high;
            }
            let lines: Vec<[(i32, i32); 2]> = tops
                .chunks(2)
                .zip(bottoms.chunks(2))
                .enumerate()
                .filter(|(column, (top, bottom))| *hatched && column % 2 == 0 && bottom[0].1 - top[0].1 > 1)
                .map(|(_, (top, bottom))| [(top[0].0 + 2, top[0].1), (top[0].0 + 2, bottom[0].1)])
                .collect();
            simplify(&mut tops);
            simplify(&mut bottoms);
            let outline: Vec<(i32, i32)> = tops.into_iter().chain(bottoms.into_iter().rev()).collect();
            area.draw(&Polygon::new(outline, fill.filled())).map_err(text)?;
            for line in lines {
                area.draw(&PathElement::new(line, WHITE.stroke_width(1))).map_err(text)?;
            }
        }
        area.draw(&Rectangle::new([(4, 4), (4 + width, 4 + HEIGHT)], INK.stroke_width(1))).map_err(text)?;
        let total = picture.bytes.iter().sum::<u64>() as f64;
        let (unit, of) = if total >= GIB as f64 { ("GiB", GIB) } else { ("MiB", MIB) };
        for quarter in 0..=4 {
            let at = 4 + quarter * width / 4;
            area.draw(&PathElement::new([(at, 4 + HEIGHT), (at, 8 + HEIGHT)], INK.stroke_width(1))).map_err(text)?;
            let value = f64::from(quarter) / 4.0 * total / of as f64;
            let (words, anchor) = match quarter {
                0 => ("0".to_owned(), HPos::Left),
                4 => (format!("{value:.2} {unit}"), HPos::Center),
                _ => (format!("{value:.2}"), HPos::Center),
            };
            label(area, &words, (at, HEIGHT + 18), 11, anchor)?;
        }
        Ok(())
    })
}

/// Drops points between two of the same height.
fn simplify(points: &mut Vec<(i32, i32)>) {
    let mut kept: Vec<(i32, i32)> = Vec::new();
    for point in points.drain(..) {
        if let [.., a, b] = kept[..]
            && a.1 == b.1
            && b.1 == point.1
        {
            kept.pop();
        }
        kept.push(point);
    }
    *points = kept;
}

/// What the fills of [`addresses`] and the lines of [`memory`] mean.
pub(super) fn legend() -> Result<String, String> {
    svg((760, 56), "legend", |area| {
        let mut x = 8;
        for (name, fill, hatched) in &FILLS {
            let (from, to) = ((x, 6), (x + 26, 22));
            rectangle(area, from, to, fill.as_ref())?;
            if *hatched {
                for line in (from.0 + 4..to.0).step_by(6) {
                    area.draw(&PathElement::new([(line, from.1), (line, to.1)], WHITE.stroke_width(2)))
                        .map_err(text)?;
                }
            }
            label(area, name, (x + 32, 15), 13, HPos::Left)?;
            x += 50 + 7 * name.len() as i32;
        }
        rectangle(area, (8, 34), (34, 48), Some(&LIGHT))?;
        label(area, "reserved (area)", (40, 42), 13, HPos::Left)?;
        for dash in [180, 189, 198] {
            area.draw(&PathElement::new([(dash, 42), (dash + 6, 42)], OWN.stroke_width(2))).map_err(text)?;
        }
        label(area, "allocated (dashed)", (212, 42), 13, HPos::Left)?;
        area.draw(&PathElement::new([(370, 42), (396, 42)], INK.stroke_width(1))).map_err(text)?;
        label(area, "requested (thin line)", (402, 42), 13, HPos::Left)
    })
}

/// Bars of one quantity, the best first, with its value at each; those without a value say why.
pub(super) fn bars(quantity: Quantity, group: &[&Measured]) -> Result<String, String> {
    let asked = |measured: &&&Measured| quantity != Quantity::Least || measured.row.least_searched;
    let mut rows: Vec<(Option<f64>, &str)> = group
        .iter()
        .filter(asked)
        .map(|measured| (quantity.of(&measured.row), measured.row.allocator.as_str()))
        .collect();
    rows.sort_by(|a, b| a.0.unwrap_or(f64::INFINITY).total_cmp(&b.0.unwrap_or(f64::INFINITY)));
    let most = rows.iter().filter_map(|row| row.0).fold(0.0, f64::max);
    // Factors of the peak start at 1: all that is above it is waste.
    let base = if quantity == Quantity::Least { 1.0 } else { 0.0 };
    let title = match quantity {
        Quantity::Least => "least memory, × peak requested (bars start at 1)",
        other => other.name(),
    };
    svg((480, 26 + 20 * rows.len() as u32), title, |area| {
        label(area, title, (4, 10), 14, HPos::Left)?;
        for (line, (value, name)) in rows.iter().enumerate() {
            let y = 26 + 20 * line as i32;
            label(area, name, (132, y + 8), 12, HPos::Right)?;
            let Some(value) = value else {
                label(
                    area,
                    if quantity == Quantity::Least { "more than 4" } else { "does not complete" },
                    (142, y + 8),
                    12,
                    HPos::Left,
                )?;
                continue;
            };
            let share = if most > base { (value - base) / (most - base) } else { 0.0 };
            let end = 138 + (share.clamp(0.0, 1.0) * 260.0) as i32 + 1;
            let own = name.starts_with("xseg");
            rectangle(area, (138, y + 1), (end, y + 15), Some(if own { &OWN } else { &LIGHT }))?;
            if own {
                hatch(area, (138, y + 1), (end, y + 15))?;
            }
            let shown = if quantity == Quantity::Least { format!("{value:.4}") } else { format!("{value:.1}") };
            label(area, &shown, (end + 5, y + 8), 12, HPos::Left)?;
        }
        Ok(())
    })
}

/// Stalls of one allocation under the limit: a mark of its own shape for each share, on a logarithmic axis.
pub(super) fn stalls(group: &[&Measured]) -> Result<String, String> {
    let rows: Vec<_> = group.iter().filter_map(|m| Some((m.row.limited.stall_us?, m.row.allocator.as_str()))).collect();
    let most = rows.iter().map(|row| row.0.max).fold(10.0, f64::max);
    let decades = most.log10().ceil().max(1.0);
    // Nothing at all stands at the left edge.
    let x = |micros: f64| 150 + (micros.max(1.0).log10() / decades * 300.0) as i32;
    let title = "stall of one allocation under the limit, µs";
    svg((480, 66 + 20 * rows.len() as u32), title, |area| {
        label(area, title, (4, 10), 14, HPos::Left)?;
        label(area, "○ median   △ 99 %   □ 99.9 %   × longest; left edge: 1 µs or none", (4, 28), 12, HPos::Left)?;
        let bottom = 44 + 20 * rows.len() as i32;
        for decade in 0..=decades as i32 {
            let at = x(10f64.powi(decade));
            area.draw(&PathElement::new([(at, 40), (at, bottom)], LIGHT.stroke_width(1))).map_err(text)?;
            let words = ["1", "10", "100", "10³", "10⁴", "10⁵", "10⁶", "10⁷", "10⁸"];
            label(area, words.get(decade as usize).unwrap_or(&""), (at, bottom + 10), 11, HPos::Center)?;
        }
        for (line, (stall, name)) in rows.iter().enumerate() {
            let y = 50 + 20 * line as i32;
            label(area, name, (140, y), 12, HPos::Right)?;
            area.draw(&PathElement::new([(x(stall.p50), y), (x(stall.max), y)], MIDDLE.stroke_width(1)))
                .map_err(text)?;
            area.draw(&Circle::new((x(stall.p50), y), 4, INK.stroke_width(1))).map_err(text)?;
            area.draw(&TriangleMarker::new((x(stall.p99), y), 5, INK.stroke_width(1))).map_err(text)?;
            let p999 = x(stall.p999);
            area.draw(&Rectangle::new([(p999 - 4, y - 4), (p999 + 4, y + 4)], INK.stroke_width(1))).map_err(text)?;
            area.draw(&Cross::new((x(stall.max), y), 5, INK.stroke_width(2))).map_err(text)?;
        }
        Ok(())
    })
}

/// GB/s of remapping and of copying over the size of handles, both axes logarithmic.
pub(super) fn moving(moving: &Moving) -> Result<String, String> {
    let rates = &moving.rates;
    let (Some(first), Some(last)) = (rates.first(), rates.last()) else { return Ok(String::new()) };
    let all = || rates.iter().flat_map(|rate| [rate.bare_gb_s, rate.heap_gb_s, rate.copy_gb_s]);
    let low = all().fold(f64::INFINITY, f64::min) / 2.0;
    let high = all().fold(0.0, f64::max) * 2.5;
    let name = format!("moving against copying on {}", moving.backend);
    svg((640, 384), &name, |area| {
        let mut x = 70;
        for (words, colour, dashed) in
            [("● bare remap", OWN, false), ("▲ through the heap", OWN, true), ("× copy", INK, false)]
        {
            let step = if dashed { 9 } else { 6 };
            for from in (x..x + 30).step_by(step) {
                area.draw(&PathElement::new([(from, 372), (from + 6, 372)], colour.stroke_width(2))).map_err(text)?;
            }
            label(area, words, (x + 38, 372), 13, HPos::Left)?;
            x += 190;
        }
        let area = &area.margin(0, 24, 0, 0);

        let sizes = (first.handle_mib as f64)..(last.handle_mib as f64 * 1.05);
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .caption(&name, style(15))
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(sizes.log_scale(), (low..high).log_scale())
            .map_err(text)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(4)
            .x_label_formatter(&|mib| format!("{mib:.0}"))
            .y_label_formatter(&|rate| format!("{rate:.0}"))
            .x_desc("handle, MiB")
            .y_desc("GB/s")
            .label_style(style(12))
            .draw()
            .map_err(text)?;
        let points = |of: fn(&crate::suite::moving::Rate) -> f64| {
            rates.iter().map(|rate| (rate.handle_mib as f64, of(rate))).collect::<Vec<_>>()
        };
        let (bare, heap, copy) = (points(|r| r.bare_gb_s), points(|r| r.heap_gb_s), points(|r| r.copy_gb_s));
        chart.draw_series(LineSeries::new(bare.clone(), OWN.stroke_width(2))).map_err(text)?;
        chart.draw_series(bare.iter().map(|at| Circle::new(*at, 5, OWN.filled()))).map_err(text)?;
        chart.draw_series(DashedLineSeries::new(heap.clone(), 6, 4, OWN.stroke_width(2))).map_err(text)?;
        chart.draw_series(heap.iter().map(|at| TriangleMarker::new(*at, 6, OWN.filled()))).map_err(text)?;
        chart.draw_series(LineSeries::new(copy.clone(), INK.stroke_width(2))).map_err(text)?;
        chart.draw_series(copy.iter().map(|at| Cross::new(*at, 5, INK.stroke_width(2)))).map_err(text)?;
        if let Some(mib) = moving.crossover_mib.filter(|mib| *mib > first.handle_mib as f64) {
            let line = DashedLineSeries::new([(mib, low), (mib, high)], 3, 5, MIDDLE.stroke_width(1));
            chart.draw_series(line).map_err(text)?;
            let words = format!("crossover {mib:.1} MiB");
            chart.draw_series([Text::new(words, (mib * 1.03, high / 1.3), style(13))]).map_err(text)?;
        }
        Ok(())
    })
}

/// The top of the axes of [`memory`], one for a workload: the most that any run reserved, but no more than twice the peak
/// requested, so that one huge allocator does not press the others flat.
pub(super) fn top(group: &[&Measured]) -> u64 {
    let runs = group.iter().filter_map(|measured| measured.plenty.as_ref());
    let most = runs.flat_map(|run| &run.samples).map(|sample| sample.reserved).max().unwrap_or(1);
    let peak = group.first().map_or(most, |first| first.row.peak_requested_bytes);
    let top = most.min(2 * peak);
    top + top / 20
}
