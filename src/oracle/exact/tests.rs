use super::*;

#[test]
fn the_lowest_bit_is_the_power_of_two_that_divides() {
    for (value, bit) in [(1.0, 1.0), (-6.0, 2.0), (0.75, 0.25), (48.0, 16.0), (0.0, f64::INFINITY)] {
        assert_eq!(lowest_bit(value), bit, "{value}");
    }
}

#[test]
fn a_sum_that_may_round_is_refused() {
    let wide = Array2::from_elem((1, 2), 4096.0);
    assert!(product("o", wide.view(), wide.t(), None).is_ok());
    let mut narrow = wide.clone();
    narrow[[0, 1]] = 1.0;
    let error = product("o", narrow.view(), narrow.t(), None).unwrap_err().to_string();
    assert!(error.contains("`o` at [0, 0] is outside the exact regime"), "{error}");
}

/// (1 + 2⁻¹¹)² is in units of 2⁻²², of which it has 2²² and a few: two such terms are 2²³.
#[test]
fn the_unit_of_a_product_is_the_product_of_the_units() {
    let terms = |count: usize| Array2::from_elem((1, count), 1.0 + libm::exp2(-11.0));
    assert!(product("o", terms(1).view(), terms(1).t(), None).is_ok());
    assert!(product("o", terms(2).view(), terms(2).t(), None).is_err());
    // A bias is a term too, and its unit counts.
    let bias = |value: f64| Array1::from_elem(1, value);
    assert!(product("o", terms(1).view(), terms(1).t(), Some(bias(0.5).view())).is_ok());
    assert!(product("o", terms(1).view(), terms(1).t(), Some(bias(1.0).view())).is_err());
    assert!(product("o", terms(1).view(), terms(1).t(), Some(bias(libm::exp2(-23.0)).view())).is_err());
}

#[test]
fn every_element_that_differs_is_counted_and_the_first_is_named() {
    let of = |values: &[f64]| {
        let values = ArrayD::from_shape_vec(vec![1, values.len()], values.to_vec()).unwrap();
        Results::from([(Output::O, Stored { dtype: DType::BF16, values })])
    };
    let expected = of(&[1.0, 0.0, 2.0, -3.0]);
    let found = differences(&of(&[1.0, -0.0, 4.0, f64::NAN]), &expected).unwrap();
    let first = Difference { output: Output::O, elements: 2, at: vec![0, 2], value: 4.0, expected: 2.0 };
    assert_eq!(found, [first]);
    assert_eq!(differences(&of(&[0.0; 4]), &expected).unwrap()[0].elements, 3);
    assert!(differences(&expected, &expected).unwrap().is_empty());
}

#[test]
fn a_sum_of_as_many_units_as_the_regime_has_is_refused_and_one_less_is_not() {
    for (units, exact) in [(UNITS - 1.0, true), (UNITS, false), (UNITS + 1.0, false)] {
        // An odd number and a bias of one unit.
        let (left, one) = (Array2::from_elem((1, 1), units - 1.0), Array2::ones((1, 1)));
        let bias = Array1::ones(1);
        assert_eq!(product("o", left.view(), one.view(), Some(bias.view())).is_ok(), exact, "{units}");
    }
}

/// Two tokens go to expert 0; token 2 goes nowhere, and nothing comes to expert 1.
#[test]
fn a_row_of_zeros_is_refused_wherever_something_is_to_be_written() {
    let pairs = [(TokenId(0), ExpertId(0)), (TokenId(1), ExpertId(0))];
    let routing = Routing::new(3, 2, pairs).unwrap();
    let gating = Gating::Given { routing: routing.clone(), scores: vec![1.0; 2] };
    let ones = |dim: (usize, usize)| Array2::<f64>::ones(dim);
    let problem = Problem::new(
        ones((3, 8)),
        Array3::<f64>::ones((2, 4, 8)),
        Array3::<f64>::ones((2, 8, 2)),
        None,
        gating,
        Activation::SwiGlu,
        ones((3, 8)),
    )
    .unwrap();
    let layer = Layer { problem: &problem, routing: &routing, scores: vec![1.0; 2], storage: DType::BF16 };
    let refused = |output: Output, shape: &[usize], zeros: &[usize]| {
        let mut values = ArrayD::from_elem(shape, 1.0);
        // Rows of the last axis, one after the other.
        for &row in zeros {
            let numbers = values.as_slice_mut().unwrap().chunks_mut(*shape.last().unwrap()).nth(row).unwrap();
            numbers.fill(0.0);
        }
        let results = Results::from([(output, Stored { dtype: DType::BF16, values })]);
        layer.no_row_is_zero(&results).err().map(|error| error.to_string())
    };
    let at = |output: &str, at: [usize; 2]| format!("`{output}` at {at:?} is outside the exact regime");
    for (output, shape, none, zeros, first) in [
        (Output::O, &[3, 8][..], &[2][..], 1, [1, 0]),
        (Output::Dx, &[3, 8], &[2], 0, [0, 0]),
        (Output::Dw1, &[2, 4, 8], &[4, 5, 6, 7], 3, [0, 3]),
        (Output::Dw2, &[2, 8, 2], &[8, 12, 15], 5, [0, 5]),
        (Output::Db1, &[2, 4], &[1], 0, [0, 0]),
        (Output::Db2, &[2, 8], &[1], 0, [0, 0]),
        (Output::H, &[2, 4], &[], 1, [1, 0]),
        (Output::Ds, &[2], &[], 0, [0, 0]),
    ] {
        assert_eq!(refused(output, shape, none), None, "{output}");
        let error = refused(output, shape, &[none, &[zeros]].concat()).unwrap_or_default();
        assert!(error.contains(&at(output.name(), first)), "{output}: {error}");
        // One number other than 0 is enough.
        if shape.len() > 1 {
            let mut values = ArrayD::from_elem(shape, 0.0);
            values.as_slice_mut().unwrap().chunks_mut(*shape.last().unwrap()).for_each(|row| row[1] = -1.0);
            let results = Results::from([(output, Stored { dtype: DType::BF16, values })]);
            assert!(layer.no_row_is_zero(&results).is_ok(), "{output}");
        }
    }
    assert_eq!(refused(Output::O, &[3, 0], &[]), None, "a row of nothing");
}

#[test]
fn another_shape_and_storage_in_f64_are_refused_by_name() {
    let of = |shape: &[usize]| {
        Results::from([(Output::O, Stored { dtype: DType::BF16, values: ArrayD::zeros(shape.to_vec()) })])
    };
    let error = differences(&of(&[3, 2]), &of(&[2, 3])).unwrap_err().to_string();
    assert!(error.contains("`o` has shape [3, 2], expected [2, 3]"), "{error}");
    let problem = one_unit(Activation::SwiGlu, [1.0, 1.0], 1.0, 1.0);
    let error = super::expected(&problem, DType::F64).unwrap_err().to_string();
    assert!(error.contains("storage type of the exact regime `f64`") && error.contains("bf16"), "{error}");
}

/// One token, one expert, one unit: gate and up are what they are said to be.
fn one_unit(activation: Activation, [gate, up]: [f64; 2], dout: f64, score: f64) -> Problem<'static, f64> {
    let routing = Routing::new(1, 1, [(TokenId(0), ExpertId(0))]).unwrap();
    let w1 = Array3::from_shape_vec((1, 2, 1), vec![gate, up]).unwrap();
    let (x, w2, dout) = (Array2::ones((1, 1)), Array3::ones((1, 1, 1)), Array2::from_elem((1, 1), dout));
    Problem::new(x, w1, w2, None, Gating::Given { routing, scores: vec![score] }, activation, dout).unwrap()
}

fn of_one_unit(activation: Activation, of_unit: [f64; 2], dout: f64, score: f64) -> Result<Results> {
    super::expected(&one_unit(activation, of_unit, dout, score), DType::BF16)
}

/// What `claim` says of its layer, stored in bf16.
fn with_layer(problem: &Problem<'_, f64>, claim: impl FnOnce(&Layer<'_, '_>)) {
    let Gating::Given { routing, scores } = problem.gating() else { panic!("given pairs") };
    claim(&Layer { problem, routing, scores: routing.to_rows(scores), storage: DType::BF16 });
}

fn refused(found: Result<Results>) -> String {
    found.expect_err("outside the regime").to_string()
}

/// σ is 1 in f32 from 21 on, and 0 up to −104, where nothing of the row is left but 0.
#[test]
fn a_smooth_activation_is_exact_where_it_is_flat_and_nowhere_else() {
    for gate in [20.75, 1.0, 0.0, -20.0, -103.5] {
        let error = refused(of_one_unit(Activation::SwiGlu, [gate, 2.0], 1.0, 1.0));
        assert!(error.contains(&format!("σ({gate}) is neither 0 nor 1")), "{gate}: {error}");
    }
    assert!(of_one_unit(Activation::SwiGlu, [21.0, 2.0], 1.0, 1.0).is_ok());
    let error = refused(of_one_unit(Activation::SwiGlu, [-104.0, 2.0], 1.0, 1.0));
    assert!(error.contains("this row is 0"), "{error}");
    // A kink has two flat sides, and at 0 the slope of the lower one.
    assert!(of_one_unit(Activation::ReGlu, [1.0, 2.0], 1.0, 1.0).is_ok());
    with_layer(&one_unit(Activation::ReGlu, [1.0, 2.0], 1.0, 1.0), |layer| {
        for (gate, value, slopes) in [(0.0, 0.0, [0.0, 0.0]), (0.5, 1.5, [3.0, 0.5]), (-0.5, 0.0, [0.0, 0.0])] {
            let unit = layer.activate(Array1::from(vec![9.0, 9.0, gate, 3.0]).view(), 0, 1).unwrap();
            assert_eq!((unit.value, unit.slopes), (value, vec![(2, slopes[0]), (3, slopes[1])]), "{gate}");
        }
    });
}

/// 129² has 15 bits, of which bf16 keeps 8.
#[test]
fn what_is_stored_between_kernels_has_to_be_a_number_of_the_type() {
    for (of_unit, dout, score, name) in
        [([129.0, 129.0], 1.0, 1.0, "a"), ([2.0, 129.0], 129.0, 1.0, "dh"), ([2.0, 129.0], 129.0, -1.0, "dh")]
    {
        let error = refused(of_one_unit(Activation::ReGlu, of_unit, dout, score));
        assert!(error.contains(&format!("`{name}` at [0, 0] is outside")), "{error}");
    }
    with_layer(&one_unit(Activation::ReGlu, [1.0, 2.0], 1.0, 1.0), |layer| {
        let row = Array1::from(vec![1.0, 257.0, 259.0]);
        let error = layer.representable("h", 3, row.view()).unwrap_err().to_string();
        assert!(error.contains("`h` at [3, 1] is outside"), "{error}");
        let largest = DType::BF16.largest();
        let stored = |value: f64| layer.stored("o", Array2::from_elem((1, 1), value));
        assert!(stored(largest).is_ok() && stored(-largest).is_ok());
        assert!(stored(largest.next_up()).is_err() && stored(-2.0 * largest).is_err());
    });
}
