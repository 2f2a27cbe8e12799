// The dynamics of Gymnasium's Pendulum-v1: swing up a rod by a torque too weak to lift it at once.
// g = 10 m/s^2, m = 1 kg, l = 1 m, dt = 0.05 s, semi-implicit Euler; the angle is 0 upright, in rad.
#pragma once

#include <algorithm>
#include <cmath>

struct Pendulum {
    static constexpr double max_speed = 8, max_torque = 2, dt = 0.05, pi = 3.14159265358979323846;
    double angle = pi, speed = 0;  // rad, rad/s

    // The angle brought into [-pi, pi).
    static double wrapped(double angle) {
        double rest = std::fmod(angle + pi, 2 * pi);
        if (rest < 0) rest += 2 * pi;
        return rest - pi;
    }

    // Applies a torque (N m) for one step; returns the reward for the state before it.
    double step(double torque) {
        torque = std::clamp(torque, -max_torque, max_torque);
        const double off = wrapped(angle);
        const double cost = off * off + 0.1 * speed * speed + 0.001 * torque * torque;
        speed = std::clamp(speed + (15.0 * std::sin(angle) + 3.0 * torque) * dt, -max_speed, max_speed);
        angle += speed * dt;
        return -cost;
    }
};
