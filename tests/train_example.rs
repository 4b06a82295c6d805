//! The training example on the host backend.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "../examples/train.rs"]
#[allow(dead_code, unused_imports, reason = "the program's `main` is not called here")]
mod train;

use clap::Parser;
use train::host::HostMaths;
use train::memory::Plain;
use train::model::{Model, Plan};
use train::{Arguments, Trained};

/// A model that trains in a second.
const SMALL: [&str; 8] = ["--width", "32", "--layers", "1", "--batch", "16", "--longest", "256"];

fn run(arguments: &[&str]) -> (Result<bool, String>, String) {
    let mut out = Vec::new();
    let arguments = Arguments::parse_from(["train"].iter().chain(&SMALL).chain(arguments));
    let done = train::run(&arguments, &mut out).map_err(|error| error.to_string());
    (done, String::from_utf8(out).unwrap())
}

/// A column of the lines of the steps.
fn column(text: &str, index: usize) -> Vec<f64> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let steps = lines.filter(|words| words.len() == 10 && words[0].parse::<u32>().is_ok());
    steps.map(|words| words[index].parse().unwrap()).collect()
}

#[test]
fn the_heap_changes_no_loss_and_the_loss_falls() {
    let (done, text) = run(&["--steps", "5"]);
    assert_eq!(done, Ok(true), "{text}");
    let losses = column(&text, 2);
    assert_eq!(losses.len(), 5, "{text}");
    // The first guess is as good as any: the logarithm of 128 bytes is 4.85.
    assert!((4.0..6.0).contains(&losses[0]) && losses[4] < losses[0] - 0.4, "{losses:?}");
    let lengths = column(&text, 1);
    assert!(lengths.iter().any(|length| *length != lengths[0]), "{lengths:?}");
}

#[test]
fn under_a_tight_limit_memory_moves_and_the_losses_stay() {
    let (done, text) = run(&["--steps", "4", "--limit", "1.1x"]);
    assert_eq!(done, Ok(true), "{text}");
    let (moved, live, reserved) = (column(&text, 7), column(&text, 5), column(&text, 6));
    assert!(*moved.last().unwrap() > 0.0, "{text}");
    assert!(reserved.last().unwrap() <= &(live.last().unwrap() * 1.1), "{text}");
}

#[test]
fn without_room_it_says_so() {
    let (done, _) = run(&["--steps", "2", "--limit", "0.8x"]);
    assert!(done.unwrap_err().contains("out of memory"));
    let (done, _) = run(&["--backend", "sim"]);
    assert!(done.unwrap_err().contains("give --backend host"));
    let (done, _) = run(&["--heads", "7"]);
    assert!(done.unwrap_err().contains("no multiple"));
}

#[test]
fn a_loss_that_differs_in_one_bit_is_told() {
    let trained = |with: Vec<f32>| Trained { without: vec![4.5, 3.25], with };
    let next = f32::from_bits(3.25f32.to_bits() + 1);
    assert_eq!(train::compare(&trained(vec![4.5, 3.25]), 0.0), Ok(()));
    assert!(train::compare(&trained(vec![4.5, next]), 0.0).unwrap_err().starts_with("step 1: "));
    assert_eq!(train::compare(&trained(vec![4.5, next]), 1e-6), Ok(()));
    assert!(train::compare(&trained(vec![4.5]), 0.0).is_err());
    let broken = Trained { without: vec![f32::NAN], with: vec![f32::NAN] };
    assert!(train::compare(&broken, 0.0).is_err());
}

#[test]
fn the_gradient_is_the_slope_of_the_loss() {
    let plan = Plan { steps: 1, layers: 2, width: 24, heads: 3, batch: 3, longest: 20, seed: 5 };
    let maths = HostMaths(Plain::default());
    let batch = plan.batch_of(0);
    let first = Model::new(&maths, plan).unwrap();
    let (_, gradients) = first.gradients(&batch).unwrap();
    // Each tensor by itself: the loss a little down the gradient against a little up.
    for (index, gradient) in gradients.iter().enumerate() {
        let steepness: f64 = gradient.iter().map(|d| f64::from(*d).powi(2)).sum();
        let by = (0.01 / steepness.sqrt()) as f32;
        let [up, down] = [by, -by].map(|by| {
            let mut model = Model::new(&maths, plan).unwrap();
            let weights = model.tensors[index].weights.iter_mut();
            weights.zip(gradient.iter()).for_each(|(weight, d)| *weight += by * d);
            f64::from(model.gradients(&batch).unwrap().0)
        });
        let slope = (up - down) / (2.0 * f64::from(by));
        assert!(steepness > 1e-8 && (slope / steepness - 1.0).abs() < 0.03, "tensor {index}: {slope} for {steepness}");
    }
}
